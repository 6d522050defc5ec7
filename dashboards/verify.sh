#!/usr/bin/env bash
# Proves the dashboards against a Grafana of yours: imports them into a scratch folder, runs every query of every panel
# through Grafana's own API, says which panels are empty, and removes what it made, however it ends.
#
#   dashboards/verify.sh URL TOKEN [DATASOURCE_UID]      TOKEN: a service account with role Editor; - reads GRAFANA_TOKEN
#
# What to look at, from the environment:
#   FROM, TO       time range as Grafana writes it (now-1h, now, or unix milliseconds)
#   VAR_job, ...   value of a dashboard variable; by default the first one, a named GPU's before others
#
# Exit status: 0 every panel that must have data has it; 1 one is empty or a query failed, or the folder could not be
# removed; 2 wrong use, or Grafana cannot be used. Needs bash, curl and jq. It never touches other folders or dashboards.
set -euo pipefail

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
die() { echo "verify: $*" >&2; exit 2; }

[ $# -ge 2 ] && [ $# -le 3 ] || usage
for tool in curl jq; do command -v "$tool" >/dev/null || die "$tool is missing: install it"; done
url=${1%/}
token=$2
[ "$token" != - ] || token=${GRAFANA_TOKEN:?set GRAFANA_TOKEN, or give the token}
source_uid=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
from=${FROM:-now-1h}
to=${TO:-now}
folder="sdcwatch-verify-$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')"
work=$(mktemp -d)
# The token goes through a file of ours alone: a command line can be read by every user of the machine.
(umask 077 && printf 'header = "Authorization: Bearer %s"\n' "$token" >"$work/curl")

# call METHOD PATH [BODY]: prints the answer; fails where Grafana does not answer 2xx, with its words on stderr.
call() {
  local status
  status=$(curl -sS --max-time 60 -K "$work/curl" -X "$1" -H 'Content-Type: application/json' -o "$work/answer" \
    -w '%{http_code}' ${3+--data-binary "@$3"} "$url$2") || return 1
  if [[ $status != 2* ]]; then
    echo "verify: $1 $2 answered $status: $(head -c 400 "$work/answer")" >&2
    return 1
  fi
  cat "$work/answer"
}

made=
clean() {
  local status=$?
  trap - EXIT
  if [ -n "$made" ]; then
    # The uid was chosen before the request, so this also undoes a folder whose creation was never answered.
    call DELETE "/api/folders/$folder?forceDeleteRules=true" >/dev/null 2>"$work/why" ||
      grep -q ' answered 404' "$work/why" || {
        echo "verify: folder $folder is still there, delete it by hand: $(cat "$work/why")" >&2
        [ "$status" -ne 0 ] || status=1
      }
  fi
  rm -rf "$work"
  exit "$status"
}
trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

call GET /api/datasources >"$work/sources" || die "cannot list data sources: is $url a Grafana, and the token's role Editor?"
if [ -z "$source_uid" ]; then
  source_uid=$(jq -r 'map(select(.type == "prometheus")) | sort_by(.isDefault | not) | .[0].uid // empty' "$work/sources")
fi
[ -n "$source_uid" ] || die "this Grafana has no Prometheus data source; give its uid as the third argument"

made=yes
jq -n --arg uid "$folder" '{uid: $uid, title: $uid}' >"$work/body"
call POST /api/folders "$work/body" >/dev/null || die "cannot make the scratch folder $folder"

# first_value LABEL SELECTOR: the first value of a label, through Grafana; nothing where there is none.
first_value() {
  local query
  query=$(jq -rn --arg selector "$2" '"match[]=" + ($selector | @uri)')
  call GET "/api/datasources/uid/$source_uid/resources/api/v1/label/$1/values?$query" | jq -r '.data[0] // empty'
}

# value_of VARIABLE (JSON): as the environment says, else its default, else the first that Prometheus has.
value_of() {
  local name given definition metric label found
  name=$(jq -r .name <<<"$1")
  given="VAR_$name"
  if [ -n "${!given:-}" ]; then
    printf '%s' "${!given}"
  elif [ "$(jq -r .type <<<"$1")" != query ]; then
    jq -rj '.current.value' <<<"$1"
  elif [ "$(jq -r .includeAll <<<"$1")" = true ]; then
    jq -rj .allValue <<<"$1"
  else
    definition=$(jq -r .definition <<<"$1")
    label=$(sed -E 's/.*, *([A-Za-z_]+)\)$/\1/' <<<"$definition")
    metric=$(sed -E 's/label_values\(([a-z_]+).*/\1/' <<<"$definition")
    found=$(first_value "$label" sdc_last_mismatch_timestamp_seconds)
    [ -n "$found" ] || found=$(first_value "$label" "$metric")
    printf '%s' "$found"
  fi
}

empty=0 excused=0 failed=0 full=0
for file in "$here"/*.json; do
  name=$(basename "$file" .json)
  # A uid of its own: the dashboards that this Grafana may already have stay as they are.
  jq --arg folder "$folder" --arg uid "$folder-$name" \
    '{dashboard: (. + {id: null, uid: ($uid | .[0:40])}), folderUid: $folder, overwrite: false}' "$file" >"$work/body"
  call POST /api/dashboards/db "$work/body" >/dev/null || die "cannot import $name"

  variables='{}'
  while read -r variable; do
    value=$(value_of "$variable") || die "cannot read the values of a variable of $name"
    variables=$(jq -c --arg name "$(jq -r .name <<<"$variable")" --arg value "$value" '.[$name] = $value' <<<"$variables")
  done < <(jq -c '.templating.list[] | select(.type != "datasource")' "$file")
  echo "$name: imported; $(jq -r 'to_entries | map(.key + "=" + .value) | join(" ")' <<<"$variables")"

  while read -r panel; do
    title=$(jq -r .title <<<"$panel")
    jq --argjson variables "$variables" --arg source "$source_uid" --arg from "$from" --arg to "$to" '
      def filled: reduce ($variables | to_entries[]) as $v
        (.; gsub("\\$(\\{" + $v.key + "(:\\w+)?\\}|" + $v.key + "\\b)"; $v.value));
      .maxDataPoints as $points | {from: $from, to: $to, queries: [.targets[] | {
        refId, expr: (.expr | filled), datasource: {type: "prometheus", uid: $source}, range, instant,
        format: (.format // "time_series"), intervalMs: 15000, maxDataPoints: $points}]}' <<<"$panel" >"$work/body"
    if ! call POST /api/ds/query "$work/body" >"$work/data" ||
      ! jq -e '.results | length > 0 and all(.[]; has("error") | not)' "$work/data" >/dev/null; then
      echo "  FAILED  $title: $(jq -r '[.results[]?.error // empty] | join("; ")' "$work/data" 2>/dev/null || true)"
      failed=$((failed + 1))
    elif jq -e '[.results[].frames[]?.data.values[]? | length] | any(. > 0)' "$work/data" >/dev/null; then
      full=$((full + 1))
    elif reason=$(jq -er '.fieldConfig.defaults.noValue // empty' <<<"$panel"); then
      echo "  empty   $title ($reason)"
      excused=$((excused + 1))
    else
      echo "  EMPTY   $title"
      empty=$((empty + 1))
    fi
  done < <(jq -c '.panels[]' "$file")
done
echo "panels: $full with data, $excused rightly empty, $empty EMPTY, $failed FAILED"
[ $((empty + failed)) -eq 0 ]
