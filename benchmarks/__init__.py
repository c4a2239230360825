"""What tfgpipe costs and gains, measured side by side with the unpipelined model."""
