{{- /* The release's name where it says what it is, else with the chart's name; room is left for suffixes. */ -}}
{{- define "everstep.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* The name is not that of nameOverride: `everstep doctor --cluster` finds the operator by it. */ -}}
{{- define "everstep.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "everstep.labels" -}}
{{ include "everstep.selectorLabels" . }}
{{ include "everstep.commonLabels" . }}
{{- end -}}

{{- /* Of what `helm test` makes: no replica of the operator, so its component is another one. */ -}}
{{- define "everstep.testLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{ include "everstep.commonLabels" . }}
{{- end -}}

{{- define "everstep.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "everstep.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "everstep.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- /* A digest names one image for ever, so the tag beside it would say nothing. */ -}}
{{- define "everstep.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /*
Which nodes count when the replicas are spread. "auto" looks at the cluster's nodes, which helm shows to `helm install` and
`helm upgrade` only: with at most one that takes ordinary pods, tainted nodes do not count. Taints of a node that is down
or cordoned do not make it one of those: it comes back.
*/ -}}
{{- define "everstep.nodeTaintsPolicy" -}}
{{- $passing := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" "node.kubernetes.io/unschedulable"
  "node.kubernetes.io/network-unavailable" "node.kubernetes.io/memory-pressure" "node.kubernetes.io/disk-pressure"
  "node.kubernetes.io/pid-pressure" -}}
{{- if eq .Values.nodeSpread "allNodes" -}}
Ignore
{{- else if eq .Values.nodeSpread "untaintedNodes" -}}
Honor
{{- else -}}
{{- $free := 0 -}}
{{- $nodes := (lookup "v1" "Node" "" "").items | default list -}}
{{- range $nodes -}}
{{- $kept := 0 -}}
{{- range .spec.taints | default list -}}
{{- if and (ne .effect "PreferNoSchedule") (not (has .key $passing)) -}}
{{- $kept = add1 $kept -}}
{{- end -}}
{{- end -}}
{{- if eq (int $kept) 0 -}}
{{- $free = add1 $free -}}
{{- end -}}
{{- end -}}
{{- if and $nodes (lt (int $free) 2) -}}Honor{{- else -}}Ignore{{- end -}}
{{- end -}}
{{- end }}

{{- /*
One operator acts on all jobs of a cluster, and replicas of two releases in two namespaces would hold two Leases: each
would act on every job. Helm shows the cluster to `helm install` and `helm upgrade` only.
*/ -}}
{{- define "everstep.refuseSecond" -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "").items | default list -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) (eq (get $labels "app.kubernetes.io/component") "operator") -}}
{{- range .subjects -}}
{{- if not (and (eq $release $.Release.Name) (eq .namespace $.Release.Namespace)) -}}
{{- fail (printf "this cluster has an operator already, release %s in namespace %s, and two would both act on each job: upgrade that one, or uninstall it first (helm uninstall %s -n %s; its CRD and jobs stay)" $release .namespace $release .namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
