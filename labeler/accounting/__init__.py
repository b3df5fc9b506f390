"""Privacy accounting: the price of a composition of noisy sums.

events      operations on private data, as frozen values whose docstrings define the mechanisms
gaussian    the exact trade-off between epsilon and delta of Gaussian noise
integer     a proven bound for the integer noise that really runs; the epsilon that a price reports
lifetime    votes for life: a spend per record, and one promise for everything that is ever asked
losses      pairs: a charge for mechanisms that no Gaussian fits, mu^2 and a mass outside it; certified convolution
winner      the price of winners alone
sampled     rounds in which every record or agent takes part at random
"""
