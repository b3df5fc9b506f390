"""A batch job in one process, `labeler run`: its task file, its folder, its rounds, its results.

task_file      what the file says
preparation    read, check and price everything, before any agent is asked
folder         the output folder and its lock
labeling       the whole job, its journal and its rounds       parties    its agents and talliers
publishing     labels, student, report: free, from what was released
student        `labeler student`, `labeler predict`            finetune   a student with its own network
demo           `labeler demo`
"""
