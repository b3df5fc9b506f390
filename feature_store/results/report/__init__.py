"""The report of a labeling job: one page for people, pictures, and the same numbers for programs.

model       what a report is made of       words      its sentences       page       the files
coverage    a map of the public set        pictures   its charts
"""
