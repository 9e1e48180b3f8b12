# shellcheck shell=bash
# What a root of its own takes over from this machine: sourced by .ci/fresh and docker/try.sh.

# The mirror from which apt of this machine has the suite $1, or nothing.
debian_mirror() {
    # shellcheck disable=SC2016  # apt's own variables
    apt-get indextargets --format '$(CODENAME) $(REPO_URI)' | awk -v suite="$1" '$1 == suite { print $2; exit }'
}

# apt's proxy for http, or nothing.
apt_proxy() {
    apt-config shell proxy Acquire::http::Proxy | sed -n "s/^proxy='\(.*\)'$/\1/p" | grep -vx DIRECT || true
}

# All that pip reads here, files and variables, as one pip.conf. A variable is printed first and wins.
pip_configuration() {
    echo '[global]'
    python3 -m pip config list |
        sed -n "s/^\(global\|install\|:env:\)\.\([a-z-]*\)=['\"]\(.*\)['\"]$/\2 = \3/p" |
        sed -e '/^cache-dir /d' -e 's/\\n/ /g' | sort -u -t= -k1,1
}

# Files and folders of this machine that the text on stdin names; of an index the folder above: its pages link to files there.
named_paths() {
    tr '[:space:]=' '\n' | sed 's|^file://\(.*\)/[^/]*$|\1|' | grep '^/' | sort -u | while read -r path; do
        if [ -e "$path" ]; then echo "$path"; fi
    done
}
