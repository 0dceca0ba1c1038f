"""Functions that Numba compiles for codecs; imported only where they are used, because Numba is an extra."""
