"""The speed of Lockstep against its peers and against bare TensorFlow; `python -m benchmarks.compare` measures it."""
