#!/bin/sh
# Make the secrets osd and osd-redis of deploy/kuberay/base in kubectl's namespace: secrets.sh [FILE WITH HF_TOKEN].
# Random passwords and keys, and a certificate of its own for redis.yaml. Existing secrets are left alone. Needs openssl.
set -eu
umask 077
token=${1:+$(realpath "$1")}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for name in redis-password ray-redis-password api-key admin-key; do openssl rand -hex 32 | tr -d '\n' >$name; done
openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj "/CN=osd-redis" \
    -addext "subjectAltName=DNS:redis,DNS:ray-redis" -keyout tls.key -out redis-ca 2>openssl.log ||
    { cat openssl.log; exit 1; }
kubectl create secret generic osd --from-file=redis-password --from-file=ray-redis-password --from-file=redis-ca \
    --from-file=api-key --from-file=admin-key ${token:+"--from-file=hf-token=$token"}
kubectl create secret generic osd-redis --from-file=tls.key --from-file=tls.crt=redis-ca
echo "Read the key of clients with: kubectl get secret osd -o 'jsonpath={.data.api-key}' | base64 --decode"
