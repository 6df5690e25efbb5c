"""Tile settings by operation: chosen from the disassembly, for Hopper. Tuned numbers of other devices go here, too."""
