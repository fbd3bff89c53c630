"""The hardware: SSD, CXL-HM, CMM-H, DRAM expander, links, copy engine, and their profiles."""
