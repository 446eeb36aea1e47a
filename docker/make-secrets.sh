#!/bin/sh
# Makes the secrets of an installation, each in a file of its own; what is there already stays as it is.
#   sh docker/make-secrets.sh [DIRECTORY [DATABASE_HOST]]
# The directory is closed to others. The files in it are not, because a container reads them as another user.
set -eu
directory=${1:-$(dirname "$0")/secrets}
host=${2:-postgres}

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() { [ -s "$directory/$1" ] || printf '%s' "$2" > "$directory/$1"; }

mkdir -p "$directory"
chmod 700 "$directory"
keep admin-token "$(random)"
keep key-secret "$(random)"
keep postgres-password "$(random)"
keep database-url "postgresql://tallygate:$(cat "$directory/postgres-password")@$host:5432/tallygate"
chmod 644 "$directory"/*
