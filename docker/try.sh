#!/usr/bin/env bash
# Builds docker/Dockerfile.cpu without a Docker engine and runs `pipetrain verify --quick` in it; nothing is left behind.
#   sudo docker/try.sh          needs: apt-get install buildah debootstrap crun
# The base is a Debian of its own (debootstrap), for no image is pulled. pip's configuration on this machine is passed into
# the build as a secret, and the folders and certificates that it names are mounted read-only.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=.ci/host.sh
source .ci/host.sh

SUITE=${SUITE:-bookworm}
WORK=$(mktemp -d -t pipetrain-image-XXXXXX)
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
run() { buildah --root "$WORK/storage" --runroot "$WORK/run" "$@"; }
trap 'run rm --all >"$WORK/rm.log" 2>&1 || true; rm -rf --one-file-system "$WORK"' EXIT

debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$WORK/debian" "$(debian_mirror "$SUITE")" \
    >"$WORK/debootstrap.log" || { tail -n 20 "$WORK/debootstrap.log" >&2; exit 1; }
rm -rf "$WORK"/debian/var/cache/apt/archives/*.deb
base=$(run from scratch)
run copy --quiet "$base" "$WORK/debian" / >/dev/null
rm -rf "$WORK/debian"
run commit --quiet --rm "$base" debian-python >/dev/null

# [1] one pip.conf of all that pip reads here [2] the local paths in it
{ pip_configuration; echo 'no-compile = true'; } >"$WORK/pip.conf"
volumes=()
while read -r path; do volumes+=(--volume "$path:$path:ro"); done < <(named_paths <"$WORK/pip.conf")

run bud --quiet --format docker --layers=false --build-arg BASE=localhost/debian-python --build-arg TORCH_INDEX= \
    --secret "id=pip,src=$WORK/pip.conf" "${volumes[@]}" -f docker/Dockerfile.cpu -t pipetrain:cpu . >/dev/null
container=$(run from --pull=never pipetrain:cpu)
run run "$container" -- pipetrain verify --quick
echo "runs as $(run run "$container" -- id -un)"
