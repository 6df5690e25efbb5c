"""What encoder and decoder agree on: two mirrored quantizers, and which of them the codes before call for.

Values are in units of the step. The quantizer A holds 0, 2, 4, ... and -1, -3, ...; code e means 2e, or 2e + 1 where e
is negative. Its mirror image holds the negatives of these, so that for symmetric values both have the same frequencies
and one table serves them (universal TCQ: Kasner, Marcellin & Hunt 1999). Of one row, codes are read channel after
channel: state 0 comes first, an odd state means the mirror image, and the parity of a code leads to the next state. The
8 states are those of VVC's dependent quantization (ITU-T H.266 v2), the 4 its older ones with other numbers.
"""

import torch

TRANSITIONS = {
    4: ((0, 1), (2, 3), (1, 0), (3, 2)),
    8: ((0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)),
}  # next state after an even and an odd code
REACH = 255  # codes that a table of costs holds, in both directions; the last column is what all others cost
LARGEST = (1 << 23) - 1  # of a code


def transitions(states: int) -> torch.Tensor:
    """int64 (states, 2)."""
    return torch.tensor(TRANSITIONS[states])


def origins(states: int) -> torch.Tensor:
    """int64 (states, 2): the two ways to each state, as twice the state that it comes from plus the code's parity."""
    return transitions(states).flatten().argsort(stable=True).view(states, 2)
