"""What a KV block is: identity, geometry, descriptors, and the protocols around it."""
