"""What the decode radix cache is worth where shared prefixes fill the decode pool."""
