"""Advice on images before and after learning: what is wrong with a folder, and which images to label next."""
