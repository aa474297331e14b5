"""Data and tokenizers of Megatron, Hugging Face and Arrow, read by their own libraries."""
