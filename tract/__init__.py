"""TraCT: lock, allocator, object store and prefix index in memory without coherent caches."""
