"""pytest fixtures for users' own tests: an emulated CXL-HM, and a fault plan."""
