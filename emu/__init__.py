"""The mechanics of the bench: clocks, pipes, memory, backing files, fabric, fault plans."""
