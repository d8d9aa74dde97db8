"""Training objectives: tensors in, loss terms out."""
