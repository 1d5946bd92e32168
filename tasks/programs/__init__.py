"""Programs that run in child processes: training, export, evaluation; the only modules that import heavy libraries.

Nothing here imports anything of ours from outside this folder, and nothing outside imports it: `bootstrap.py` loads the
folder under another package name in a child process, and `jobs.py` says what goes in and what comes out.
"""
