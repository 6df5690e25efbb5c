"""Compressors whose header was rewritten."""

import json

from vqkv.cache.compressor_folder import config_sha256


def signed(folder, change):
    """Rewrite a compressor's header as an attacker who knows the format would."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    config["config_sha256"] = config_sha256(config)
    path.write_text(json.dumps(config))
