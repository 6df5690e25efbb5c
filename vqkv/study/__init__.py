"""Experiments, figures, benches, tables and the driver of the notebooks; nothing below imports it."""
