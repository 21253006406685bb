package main

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-helpers/resource"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"

	api "mig-agent.io/api/migagent/v1"
)

const (
	// Name is the plugin's in the configuration.
	Name       = "MigAgents"
	annotation = "mig-agent.io/visible-devices"
	profiles   = "nvidia.com/mig-"
	memory     = "mig-agent.io/memory-"
)

// Plugin asks the nodes' agents where a pod has room on a GPU, and takes a lease for it there before it is bound.
//
// Of each pod it remembers nothing beyond its scheduling cycle: the lease's request id is made of the pod's UID, so that
// whoever asks again, after a crash or an answer that was lost, gets the same lease.
type Plugin struct {
	handle fwk.Handle
	agents *agents
}

var (
	_ fwk.PreFilterPlugin = &Plugin{}
	_ fwk.FilterPlugin    = &Plugin{}
	_ fwk.PreScorePlugin  = &Plugin{}
	_ fwk.ScorePlugin     = &Plugin{}
	_ fwk.ReservePlugin   = &Plugin{}
	_ fwk.PreBindPlugin   = &Plugin{}
	_ fwk.BindPlugin      = &Plugin{}
)

// New is called once for each profile of the configuration that names the plugin.
func New(ctx context.Context, given runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	where := args{Namespace: "mig-agent", Service: "mig-agent", TLS: "/tls"}
	if err := frameworkruntime.DecodeInto(given, &where); err != nil {
		return nil, err
	}
	found, err := findAgents(ctx, handle.ClientSet(), where)
	if err != nil {
		return nil, err
	}
	return &Plugin{handle: handle, agents: found}, nil
}

// Name is the plugin's.
func (*Plugin) Name() string { return Name }

// cycle is what is known of a pod while it is being scheduled.
type cycle struct {
	resources map[v1.ResourceName]int64
	wants     []*api.Want // the same as agents name it
	lock      sync.Mutex
	scores    map[string]float64 // by node; lower is better
	promise   *promise           // once it is reserved
}

// Clone gives the same: what preemption tries out changes nothing of it.
func (c *cycle) Clone() fwk.StateData { return c }

func cycleOf(state fwk.CycleState) *cycle {
	found, err := state.Read(Name)
	if err != nil {
		return nil // the pod asks for nothing of the agents
	}
	return found.(*cycle)
}

// PreFilter reads what the pod asks for; pods that ask for nothing of the agents are none of the plugin's business.
func (p *Plugin) PreFilter(_ context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	resources := resourcesOf(pod)
	if len(resources) == 0 {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	state.Write(Name, &cycle{resources: resources, wants: wantsOf(resources), scores: map[string]float64{}})
	return nil, nil
}

// PreFilterExtensions has none: that a pod is gone from a node does not tell the agent's plan without it.
func (*Plugin) PreFilterExtensions() fwk.PreFilterExtensions { return nil }

// Filter asks the node's agent for a plan. What it says where it has none is shown to the pod's owner.
func (p *Plugin) Filter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node fwk.NodeInfo) *fwk.Status {
	known, name := cycleOf(state), node.Node().Name
	score, words, err := p.agents.plan(ctx, name, known.wants)
	if err != nil {
		words = err.Error()
	}
	if words != "" {
		// Unresolvable: kube-scheduler cannot know which pods would have to go.
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, words)
	}
	for resource, count := range known.resources {
		if there := node.Node().Status.Allocatable[resource]; there.Value() < count {
			// A kubelet fails for good a pod that comes while it has no devices to give.
			return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "the node shows no "+string(resource))
		}
	}
	known.lock.Lock()
	defer known.lock.Unlock()
	known.scores[name] = score
	return nil
}

// PreScore has nothing to score for other pods.
func (p *Plugin) PreScore(_ context.Context, state fwk.CycleState, _ *v1.Pod, _ []fwk.NodeInfo) *fwk.Status {
	if cycleOf(state) == nil {
		return fwk.NewStatus(fwk.Skip)
	}
	return nil
}

// Score is the plan's in millionths of a MiB, lower is better; NormalizeScore turns it round.
func (p *Plugin) Score(_ context.Context, state fwk.CycleState, _ *v1.Pod, node fwk.NodeInfo) (int64, *fwk.Status) {
	return int64(1e6 * cycleOf(state).scores[node.Node().Name]), nil
}

// ScoreExtensions is the plugin itself.
func (p *Plugin) ScoreExtensions() fwk.ScoreExtensions { return p }

// NormalizeScore gives the best node 100 and the worst 0, and the others by their order.
func (*Plugin) NormalizeScore(_ context.Context, _ fwk.CycleState, _ *v1.Pod, scores fwk.NodeScoreList) *fwk.Status {
	order := make([]int64, 0, len(scores))
	for _, each := range scores {
		order = append(order, each.Score)
	}
	slices.SortFunc(order, func(a, b int64) int { return cmp.Compare(b, a) })
	order = slices.Compact(order)
	for i := range scores {
		place, _ := slices.BinarySearchFunc(order, scores[i].Score, func(a, b int64) int { return cmp.Compare(b, a) })
		scores[i].Score = fwk.MaxNodeScore
		if len(order) > 1 {
			scores[i].Score = int64(place) * fwk.MaxNodeScore / int64(len(order)-1)
		}
	}
	return nil
}

// Reserve starts to take the lease, and does not wait: the next pod is looked at while instances are made.
func (p *Plugin) Reserve(_ context.Context, state fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	if known := cycleOf(state); known != nil {
		known.promise = p.agents.promise(node, pod, known.wants)
	}
	return nil
}

// Unreserve gives the lease back; where the answer to Acquire is still on its way, once it has come.
func (p *Plugin) Unreserve(_ context.Context, state fwk.CycleState, pod *v1.Pod, node string) {
	known := cycleOf(state)
	if known == nil || known.promise == nil {
		return
	}
	select {
	case <-known.promise.taken:
		known.promise.giveBack() // before the pod is looked at again
	default:
		p.agents.giveBackSoon(known.promise, pod)
	}
}

// PreBindPreFlight leaves other pods alone.
func (p *Plugin) PreBindPreFlight(_ context.Context, state fwk.CycleState, _ *v1.Pod, _ string) (*fwk.PreBindPreFlightResult, *fwk.Status) {
	if cycleOf(state) == nil {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	return &fwk.PreBindPreFlightResult{AllowParallel: true}, nil
}

// PreBind waits for the lease and confirms it. A refusal sends the pod back into the queue.
func (p *Plugin) PreBind(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	if err := cycleOf(state).promise.confirm(ctx); err != nil {
		return fwk.NewStatus(fwk.Unschedulable, node+": "+err.Error())
	}
	return nil
}

// Bind writes node and annotation at once, which the framework's own binder cannot.
func (p *Plugin) Bind(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	known := cycleOf(state)
	if known == nil {
		return fwk.NewStatus(fwk.Skip) // DefaultBinder comes next
	}
	uuids := strings.Join(known.promise.uuids(), ",")
	err := p.handle.ClientSet().CoreV1().Pods(pod.Namespace).Bind(ctx, &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Annotations: map[string]string{annotation: uuids},
		},
		Target: v1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err == nil {
		klog.FromContext(ctx).Info("Bound", "pod", klog.KObj(pod), "node", node, "devices", uuids)
		return nil
	}
	// Only after these answers it is certain that the pod is not bound there, and never will be by this call. Else the
	// lease stays, and the agent ends it when it learns that the pod is elsewhere or gone, or has not come in time.
	known.promise.keep = !(apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err))
	return fwk.AsStatus(err)
}

// resourcesOf is what a pod asks the agents for: containers, sidecars and init containers, counted as Kubernetes does.
func resourcesOf(pod *v1.Pod) map[v1.ResourceName]int64 {
	found := map[v1.ResourceName]int64{}
	for name, count := range resource.PodRequests(pod, resource.PodResourcesOptions{}) {
		if strings.HasPrefix(string(name), profiles) || strings.HasPrefix(string(name), memory) {
			found[name] = count.Value()
		}
	}
	return found
}

// wantsOf names a profile for `nvidia.com/mig-1g.10gb`, and 10G for `mig-agent.io/memory-10g`.
func wantsOf(resources map[v1.ResourceName]int64) []*api.Want {
	var wants []*api.Want
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		want := &api.Want{}
		if profile, ok := strings.CutPrefix(string(name), profiles); ok {
			want.What = &api.Want_Profile{Profile: strings.ReplaceAll(profile, ".me", "+me")}
		} else {
			want.What = &api.Want_Memory{Memory: strings.ToUpper(strings.TrimPrefix(string(name), memory))}
		}
		for range resources[name] {
			wants = append(wants, want)
		}
	}
	return wants
}
