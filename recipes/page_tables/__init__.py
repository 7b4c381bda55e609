"""The tables of results: `runs` finds the committed runs, `cells` writes numbers, and each other file makes tables."""
