"""Model, text and preset -> Compressor."""
