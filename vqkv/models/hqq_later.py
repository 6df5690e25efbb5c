"""``transformers.cache_utils`` imports hqq, and that torch's compiler, for one class: here not until it quantizes."""

import sys

from transformers import configuration_utils, utils  # noqa: F401  what cache_utils imports must know hqq


class HQQQuantizer:
    """Stands for hqq's ``Quantizer``."""

    def __getattr__(self, name: str):
        from hqq.core.quantize import Quantizer

        return getattr(Quantizer, name)


available = utils.is_hqq_available
if "transformers.cache_utils" not in sys.modules and available():
    utils.is_hqq_available = bool
    try:
        from transformers import cache_utils
    finally:
        utils.is_hqq_available = available
    cache_utils.is_hqq_available, cache_utils.HQQQuantizer = available, HQQQuantizer()
