"""Secure computation of the winner of every query among three talliers; it opens nothing but the winners.

engine        a job, what an engine promises, and the randomness that one tallier deals to the two others
tournament    the winners of a chunk of queries, the comparison of two numbers, and the row check, with proofs
session       one computation: meet, check rows, compute, check ranges, open; also all three in one process
links         connections to the two other talliers, and agreement on the jobs that all three do
certificates  a tallier's own certificate, and the certificates that it accepts
"""
