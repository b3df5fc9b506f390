"""Finding the winner of every query among three talliers, so that nothing but the winner is opened.

engine        what a job is, and what an engine promises
correlations  what the dealer among the talliers deals for a comparison, and whose it is
comparison    a comparison between the two others, and why neither sees anything in it
tournament    the winners of a chunk of queries; how shares come in and what goes out
session       one computation: meet, check rows, compute, check ranges, open; and the engine that runs it
row_check     the exchanges of the row check
links         connections to the two other talliers: pinned certificates, and which jobs all three do
link          one of them: who is at the other end, and messages of known lengths
certificates  a tallier's own certificate, and whose it trusts
in_process    all three in one process, for `labeler run --winner secure`
"""
