"""A small pretrained language model without a hub: SmolLM2-135M from a package of PyPI."""
