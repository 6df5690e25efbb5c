"""Load, describe, capture keys and values.

``transformers.cache_utils`` imports hqq, and that torch's compiler, for one class: here not until it quantizes.
"""

import sys
from unittest import mock

from transformers import configuration_utils, utils  # noqa: F401  what cache_utils imports must know hqq


class HQQQuantizer:
    """Stands for hqq's ``Quantizer``."""

    def __getattr__(self, name: str):
        from hqq.core.quantize import Quantizer

        return getattr(Quantizer, name)


if "transformers.cache_utils" not in sys.modules and utils.is_hqq_available():
    with mock.patch.object(utils, "is_hqq_available", bool):
        from transformers import cache_utils
    cache_utils.is_hqq_available, cache_utils.HQQQuantizer = utils.is_hqq_available, HQQQuantizer()
