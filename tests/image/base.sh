#!/bin/bash
# Make a stand-in for Docker's image of Python from Debian's packages: base.sh ENGINE NAME. Python is in /usr instead of
# /usr/local. ENGINE is podman or buildah; needs mmdebstrap.
set -euo pipefail
engine=$1 name=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mmdebstrap --variant=minbase --quiet \
    --include=python3.11,python3-pip,python3-venv,ca-certificates,tzdata bookworm "$folder/root.tar"
cat > "$folder/Containerfile" <<'X'
FROM scratch
ADD root.tar /
# Docker's image has Python's headers, and no compiler and no headers of C.
RUN ln -sf /usr/bin/python3.11 /usr/local/bin/python && ln -sf /usr/bin/python3.11 /usr/local/bin/python3 && \
    rm -f /usr/lib/python3.11/EXTERNALLY-MANAGED && \
    apt-get update -q && cd /tmp && apt-get download -q libpython3.11-dev && \
    dpkg-deb --fsys-tarfile libpython3.11-dev_*.deb | tar -C / -x ./usr/include && \
    rm -rf /tmp/* /var/lib/apt/lists/* /var/cache/apt/*.bin
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin LANG=C.UTF-8
CMD ["python3"]
X
"$engine" build --isolation chroot --format docker --tag "$name" --file "$folder/Containerfile" "$folder"
