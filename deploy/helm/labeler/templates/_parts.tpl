{{- /* Only what Go's own text/template knows is used, so that any renderer of it checks the chart. */ -}}
{{- define "labeler.labels" -}}
{app.kubernetes.io/name: labeler, app.kubernetes.io/instance: {{ printf "%q" .Release.Name }}, app.kubernetes.io/component: {{ printf "%q" .Values.role }}}
{{- end }}
{{- define "labeler.locked" }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
{{- end }}
{{- define "labeler.resources" }}
          resources:
            requests: {cpu: {{ printf "%q" .Values.resources.cpu }}, memory: {{ printf "%q" .Values.resources.memory }}}
            limits: {memory: {{ printf "%q" .Values.resources.memoryLimit }}}
{{- end }}
{{- define "labeler.learning-resources" }}
          resources:
            requests: {cpu: {{ printf "%q" .Values.resources.cpu }}, memory: {{ printf "%q" .Values.resources.memory }}}
            limits: {memory: {{ printf "%q" .Values.resources.memoryLimit }}{{ if .Values.gpus }}, nvidia.com/gpu: {{ .Values.gpus }}{{ end }}}
{{- end }}
