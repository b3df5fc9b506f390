"""The report of a labelling job: one page for people, pictures, and the same numbers for programs.

model       what a report is made of       words      its sentences       page       the page
images      what the student says           pictures   its charts          publish    into a folder
coverage    a map of the public set         thumbnails small pictures      summary    report.json
canvas      how figures look
"""
