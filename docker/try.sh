#!/usr/bin/env bash
# Builds docker/Dockerfile.cpu without a Docker engine and runs `pipetrain verify --quick` in it; nothing is left behind.
#   sudo docker/try.sh          needs: apt-get install buildah debootstrap crun
# The base is a Debian of its own (debootstrap), for no image is pulled. pip's configuration on this machine is passed into
# the build as a secret, and the folders and certificates that it names are mounted read-only.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=${SUITE:-bookworm}
WORK=$(mktemp -d -t pipetrain-image-XXXXXX)
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
run() { buildah --root "$WORK/storage" --runroot "$WORK/run" "$@"; }
trap 'run rm --all >"$WORK/rm.log" 2>&1 || true; rm -rf --one-file-system "$WORK"' EXIT

# Debian packages come from where apt of this machine has them.
mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' | awk -v suite="$SUITE" '$1 == suite { print $2; exit }')
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$WORK/debian" "$mirror" \
    >"$WORK/debootstrap.log" || { tail -n 20 "$WORK/debootstrap.log" >&2; exit 1; }
rm -rf "$WORK"/debian/var/cache/apt/archives/*.deb
base=$(run from scratch)
run copy --quiet "$base" "$WORK/debian" / >/dev/null
rm -rf "$WORK/debian"
run commit --quiet --rm "$base" debian-python >/dev/null

# [1] one pip.conf of all that pip reads here [2] the local paths in it
python3 -m pip config list | sed -n "s/^\(global\|install\|:env:\)\.\([a-z-]*\)='\(.*\)'$/\2 = \3/p" |
    sort -u -t= -k1,1 | sed '1i [global]\nno-compile = true' >"$WORK/pip.conf"
volumes=()  # of an index the folder above: its pages link to files beside it
for path in $(tr ' =' '\n\n' <"$WORK/pip.conf" | sed 's|^file://\(.*\)/[^/]*$|\1|' | grep '^/' | sort -u); do
    if [ -e "$path" ]; then volumes+=(--volume "$path:$path:ro"); fi
done

run bud --quiet --format docker --layers=false --build-arg BASE=localhost/debian-python --build-arg TORCH_INDEX= \
    --secret "id=pip,src=$WORK/pip.conf" "${volumes[@]}" -f docker/Dockerfile.cpu -t pipetrain:cpu . >/dev/null
container=$(run from --pull=never pipetrain:cpu)
run run "$container" -- pipetrain verify --quick
echo "runs as $(run run "$container" -- id -un)"
