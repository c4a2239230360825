"""Networks: transformers, a U-Net, AmoebaNet-D."""
