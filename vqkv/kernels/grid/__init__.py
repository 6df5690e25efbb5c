"""Grids for pairs of values (HIGGS, section 4): each pair becomes the index of the nearest of a grid's points, as
residual VQ with one codebook of two channels would have it."""
