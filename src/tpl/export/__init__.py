"""A model as one ONNX file that needs neither tpl nor torch: uint8 images in, probabilities out."""
