"""Mooncake: SGLang's backend with the delta protocol."""
