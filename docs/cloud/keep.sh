#!/usr/bin/env bash
# Copy runs/ to a folder that outlives the machine, such as a mounted bucket: bash docs/cloud/keep.sh runs /kept/runs
#
# A checkpoint gets its name after it is copied completely, so a lost machine leaves no partial checkpoint. The two newest
# of each run are kept. artifacts/ is not copied: it can be made again.
set -euo pipefail
from=$1 to=$2
mkdir -p "$to"
tar -C "$from" --exclude=checkpoints --exclude=verl --exclude=.lock --exclude='.part-*' -cf - . | tar -C "$to" -xf -
for run in "$from"/*/checkpoints; do
    [ -d "$run" ] || continue
    kept=$to/${run#"$from"/}
    mkdir -p "$kept"
    rm -rf "$kept"/.part-*
    for checkpoint in "$run"/step_*; do
        name=${checkpoint##*/}
        [ -d "$checkpoint" ] && [ ! -d "$kept/$name" ] || continue
        cp -R "$checkpoint" "$kept/.part-$name"
        mv "$kept/.part-$name" "$kept/$name"
    done
    find "$kept" -maxdepth 1 -name 'step_*' | sort | head -n -2 | while read -r old; do rm -rf "$old"; done
done
