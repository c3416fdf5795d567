"""A simulated CANN: torch_npu on a machine with neither NPU nor CANN.

`build.build` compiles it, `build.environment` gives the variables for a
subprocess, and inside that process `control` reads and steers it.
"""
