"""KV-cache tiers behind one interface, one file each: the two systems and their baselines."""
