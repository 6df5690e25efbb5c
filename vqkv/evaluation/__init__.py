"""Model, compressor and text -> one row."""
