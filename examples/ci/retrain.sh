#!/bin/sh
# Retrains from any CI: starts a deployment, follows its log, writes the report into the job's summary, and ends with the
# run's outcome (the exit statuses of `enginehouse --help`). A job that is cancelled cancels the run.
#
#     PREFECT_API_URL=https://prefect.example/api sh retrain.sh train-to-deploy/digits [SUMMARY] [OPTION]...
#
# SUMMARY is a file; GitHub's own if left out. Options are those of `enginehouse runs start`, such as
# `--set train.max_epochs=3`. A server that asks for a password: PREFECT_API_AUTH_STRING.
set -eu

deployment=${1:?"which deployment? such as train-to-deploy/digits"}
summary=${2:-${GITHUB_STEP_SUMMARY:-/dev/null}}
shift "$(($# < 2 ? $# : 2))"

exec enginehouse runs start "$deployment" --summary "$summary" "$@"
