"""What HiCache's host memory is worth as a shared store instead of a cache of each worker."""
