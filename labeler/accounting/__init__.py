"""Privacy accounting: what a composition of noisy sums is worth.

events      what happened, as frozen values whose docstrings define the mechanisms
gaussian    the exact trade-off between epsilon and delta of Gaussian noise
integer     a proven bound for the integer noise that really runs; what a price reports
lifetime    votes for life: a spend per record, and one promise for everything that is ever asked
losses      pairs: what is charged where no Gaussian fits, mu^2 and a mass outside it; profiles by certified convolution
winner      what winners alone reveal
sampled     rounds in which everybody takes part at random
"""
