"""What makes parts of the documentation: `make site`, `make guide`."""
