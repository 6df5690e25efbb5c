"""Codes of 1 to 16 bits <-> bytes: code i is the bits i * bits, ..., (i + 1) * bits - 1 of its row's string, lowest
first; zeros fill a row's last byte."""
