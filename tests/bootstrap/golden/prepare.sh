tell() { printf '@sky %s\n' "$*"; }
folder='/scratch/it'"'"'s'
token=token
main() {
    umask 077
    cd /
    if mkdir -p "$folder/env" "$folder/code" "$folder/incoming/$token" && chmod 700 "$folder"; then
        # uploads of those who never came back
        find "$folder/incoming" -mindepth 1 -maxdepth 1 -mmin +1440 -exec rm -rf {} + 2>/dev/null
        for one in "$folder/incoming/$token"/*.whl; do
            if [ -f "$one" ]; then tell there "${one##*/}"; fi
        done
        tell prepared "$folder/incoming/$token"
    fi
}
main </dev/null 2>&1
