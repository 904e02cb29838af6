"""FlashAttention-4 on Hopper, an optional package, for patterns that its kernels see as lists of blocks."""

# In place of the compiled kernels: a prediction for a card that is not there takes the package as given.
STAND_IN = None
