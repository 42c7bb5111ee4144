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

{{- /* Of what Kueue's account gets: it is no operator of this cluster. */ -}}
{{- define "everstep.kueueLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: kueue
{{ include "everstep.commonLabels" . }}
{{- end -}}

{{- define "everstep.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* The address that workers get. */ -}}
{{- define "everstep.url" -}}
{{ ternary "https" "http" .Values.tls.enabled }}://{{ include "everstep.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- /* The Secret of the chart's own authority, and the one that is used. */ -}}
{{- define "everstep.ownTlsSecret" -}}
{{ include "everstep.fullname" . }}-authority
{{- end -}}

{{- define "everstep.tlsSecret" -}}
{{- .Values.tls.secretName | default (include "everstep.ownTlsSecret" .) -}}
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
{{- $nodes := list -}}
{{- if include "everstep.hasClusterRole" . -}}
{{- $nodes = (lookup "v1" "Node" "" "").items | default list -}}
{{- end -}}
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

{{- /* What the operator does with jobs and their objects: cluster-wide, or in each namespace that it watches. */ -}}
{{- define "everstep.jobRules" -}}
- apiGroups: [everstep.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [everstep.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, delete]
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.jobs }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, delete]
{{- end }}
{{- if .Values.volumeClaims.enabled }}
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create] # get: whether one is there that a quota refuses
{{- end }}
{{- range .Values.podGroups }}
- apiGroups: [{{ get (dict "Kubernetes" "scheduling.k8s.io" "Coscheduling" "scheduling.x-k8s.io" "Volcano" "scheduling.volcano.sh") . }}]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete] # patch: the smallest number of pods
{{- end }}
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch] # an evicted Workload has its quota until the operator gives it back
{{- end }}
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, update] # the rendezvous document of a job, by its name; they are never listed
- apiGroups: [events.k8s.io]
  resources: [events]
  # get and patch: repeated events are counted in one object; list: why a pod's volumes do not mount
  verbs: [get, list, create, patch]
{{- end -}}

{{- /* Of objects that no namespace keeps apart: releases that watch namespaces may have one name. */ -}}
{{- define "everstep.clusterName" -}}
{{- if .Values.watchNamespaces }}{{ .Release.Namespace }}-{{ end }}{{ include "everstep.fullname" . }}
{{- end -}}

{{- define "everstep.clusterLabels" -}}
everstep.dev/watches: {{ ternary "namespaces" "cluster" (gt (len .Values.watchNamespaces) 0) }}
{{ include "everstep.labels" . }}
{{- end -}}

{{- /* Empty: all rights are in Roles, and whoever installs needs none outside of the namespaces. */ -}}
{{- define "everstep.hasClusterRole" -}}
{{- if or (not .Values.watchNamespaces) .Values.clusterRole.readNodes .Values.clusterRole.reviewTokens .Values.page.enabled .Values.kueue.enabled -}}
true
{{- end -}}
{{- end -}}

{{- /*
Two operators that both act on a job would undo each other's work. One of the whole cluster is alone; those that watch
namespaces share none, and each has a namespace of its own for its Lease. Helm shows the cluster to `helm install` and
`helm upgrade` only, and fails where the person may not look: so a release without a ClusterRole looks at RoleBindings of
its own namespaces alone, and does not see an operator of the whole cluster.
*/ -}}
{{- define "everstep.refuseSecond" -}}
{{- if include "everstep.hasClusterRole" . -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "").items | default list -}}
{{- if ne (get (.metadata.labels | default dict) "everstep.dev/watches") "namespaces" -}}
{{- include "everstep.refuseOther" (dict "root" $ "binding" . "what" "acts on the jobs of all namespaces") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.watchNamespaces -}}
{{- range .Values.watchNamespaces -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "RoleBinding" . "").items | default list -}}
{{- if hasSuffix "-jobs" .metadata.name -}}
{{- include "everstep.refuseOther" (dict "root" $ "binding" . "what" (printf "acts on the jobs of namespace %s" .metadata.namespace)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "RoleBinding" .Release.Namespace "").items | default list -}}
{{- if hasSuffix "-leader" .metadata.name -}}
{{- include "everstep.refuseOther" (dict "root" $ "binding" . "what" "has this namespace's Lease") -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "RoleBinding" "" "").items | default list -}}
{{- if hasSuffix "-jobs" .metadata.name -}}
{{- include "everstep.refuseOther" (dict "root" $ "binding" . "what" (printf "acts on the jobs of namespace %s" .metadata.namespace)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* `binding`: of the account of an operator, by its labels. */ -}}
{{- define "everstep.refuseOther" -}}
{{- $root := .root -}}
{{- $what := .what -}}
{{- $labels := .binding.metadata.labels | default dict -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") $root.Chart.Name) (eq (get $labels "app.kubernetes.io/component") "operator") -}}
{{- range .binding.subjects -}}
{{- if not (and (eq $release $root.Release.Name) (eq .namespace $root.Release.Namespace)) -}}
{{- fail (printf "this cluster has an operator already, release %s in namespace %s, which %s, and two would both act on each job: upgrade that one, or uninstall it first (helm uninstall %s -n %s; its CRD and jobs stay)" $release .namespace $what $release .namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
