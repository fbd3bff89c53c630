"""HyMCache: Master, Lookup, KV Manager and connector over CXL hybrid memory."""
