// SPDX-License-Identifier: Apache-2.0
// A device of torch whose memory is host memory, with several instances, an allocator that counts, pinned memory,
// generators, autocast and collectives. Its kernels are those of the CPU, so that its results are too.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <mutex>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kCount = 4;
constexpr size_t kHeader = 64;

thread_local c10::DeviceIndex current = 0;
int64_t allocated[kCount], peak[kCount];

// -- memory

struct DeviceAllocator final : c10::Allocator {
  static void release(void* data) {
    if (data == nullptr) return;
    auto* header = reinterpret_cast<int64_t*>(static_cast<char*>(data) - kHeader);
    allocated[header[0]] -= header[1];
    free(header);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (size) {
      auto* header = static_cast<int64_t*>(aligned_alloc(kHeader, (size + 2 * kHeader - 1) / kHeader * kHeader));
      header[0] = current;
      header[1] = static_cast<int64_t>(size);
      allocated[current] += header[1];
      peak[current] = std::max(peak[current], allocated[current]);
      data = reinterpret_cast<char*>(header) + kHeader;
    }
    return {data, data, &release, c10::Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size) const override { memcpy(target, source, size); }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* data) {
    if (data == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(reinterpret_cast<uintptr_t>(data));
    }
    free(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? aligned_alloc(kHeader, (size + kHeader - 1) / kHeader * kHeader) : nullptr;
    if (data != nullptr) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned[reinterpret_cast<uintptr_t>(data)] = size;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size) const override { memcpy(target, source, size); }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (found == pinned.begin()) return false;
  --found;
  return reinterpret_cast<uintptr_t>(data) < found->first + found->second;
}

// -- the device: everything that is queued has ended at once

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto former = current;
    if (device.index() >= 0) current = device.index();
    return c10::Device(kType, former);
  }
  c10::Device getDevice() const override { return c10::Device(kType, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 1);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : CPUGeneratorImpl(67280421310721ULL) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& generator(int index) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < kCount; i++) all.push_back(at::make_generator<Generator>(i));
    return all;
  }();
  return made[index < 0 ? current : index];
}

struct Hooks : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kType, current); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto data = device_allocator.allocate(size);
    if (impl->data() && data.get()) memcpy(data.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

// -- operations

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto storage = tensor.storage();
  char* data = nullptr;
  if (storage.nbytes()) data = static_cast<char*>(storage.mutable_data()) + tensor.storage_offset() * tensor.element_size();
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto found = at::from_blob(data, tensor.sizes(), tensor.strides(), [storage](void*) {}, options, at::Device(at::kCPU));
  return tensor.is_conj() ? found.conj() : found;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  if (target.numel()) on_cpu(target).copy_(on_cpu(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  const_cast<Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor& set_place(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  // A view keeps its strides: operations in place come here too.
  if (tensor.sizes() == size) return tensor;
  int64_t bytes = tensor.element_size();
  for (auto one : size) bytes *= one;
  bytes += tensor.element_size() * tensor.storage_offset();
  if (static_cast<int64_t>(tensor.storage().nbytes()) < bytes) Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    auto place = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), place);
  });
  m.impl("view", [](const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("unfold", [](const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(self, dimension, size, step);
  });
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const Tensor& self) { return on_cpu(self).item(); });
  m.impl("set_.source_Storage_storage_offset", &set_place);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage storage) -> Tensor& {
    int64_t size = storage.nbytes() / self.element_size();
    return set_place(self, std::move(storage), 0, {size}, {1});
  });
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
    return set_place(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });
  m.impl("resize_", &resize);
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

// -- collectives: those of gloo, on the same memory

struct DeviceWork : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  Tensors outputs;
  DeviceWork(c10::intrusive_ptr<c10d::Work> work, Tensors tensors) : inner(std::move(work)), outputs(std::move(tensors)) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  Tensors result() override { return outputs; }
  void synchronize() override { inner->wait(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner->wait(timeout); }
  void abort() override { inner->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto made = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{});
    inner->getFuture()->addCallback([made, tensors = outputs](c10::ivalue::Future& done) {
      if (done.hasError()) made->setError(done.exception_ptr());
      else made->markCompleted(c10::IValue(tensors));
    });
    return made;
  }
};

Tensors on_cpu(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(on_cpu(tensor));
  return found;
}

TensorLists on_cpu(const TensorLists& lists) {
  TensorLists found;
  for (const auto& list : lists) found.push_back(on_cpu(list));
  return found;
}

Tensors flat(const TensorLists& lists) {
  Tensors found;
  for (const auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct DeviceBackend : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit DeviceBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "hccl"; }
  static WorkPtr with(WorkPtr work, Tensors outputs) {
    return c10::make_intrusive<DeviceWork>(std::move(work), std::move(outputs));
  }
  // gloo has no mean.
  template <typename Options>
  static Options as_sum(const Options& options) {
    auto changed = options;
    if (changed.reduceOp == c10d::ReduceOp::AVG) changed.reduceOp = c10d::ReduceOp::SUM;
    return changed;
  }
  template <typename Options>
  void divide(const Options& options, const WorkPtr& work, Tensors& tensors) const {
    if (options.reduceOp != c10d::ReduceOp::AVG) return;
    work->wait();
    for (auto& tensor : tensors) tensor.div_(getSize());
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto inner = on_cpu(tensors);
    return with(gloo->broadcast(inner, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto inner = on_cpu(tensors);
    auto work = gloo->allreduce(inner, as_sum(options));
    divide(options, work, inner);
    return with(work, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto inner = on_cpu(tensors);
    return with(gloo->allreduce_coalesced(inner, options), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto inner = on_cpu(tensors);
    return with(gloo->reduce(inner, options), tensors);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = on_cpu(outputs);
    auto in = on_cpu(inputs);
    return with(gloo->allgather(out, in, options), flat(outputs));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = on_cpu(output), in = on_cpu(input);
    return with(gloo->_allgather_base(out, in, options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto out = on_cpu(outputs), in = on_cpu(inputs);
    return with(gloo->allgather_into_tensor_coalesced(out, in, options), outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = on_cpu(outputs);
    auto in = on_cpu(inputs);
    return with(gloo->gather(out, in, options), flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto out = on_cpu(outputs);
    auto in = on_cpu(inputs);
    return with(gloo->scatter(out, in, options), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = on_cpu(outputs);
    auto in = on_cpu(inputs);
    auto work = gloo->reduce_scatter(out, in, as_sum(options));
    divide(options, work, out);
    return with(work, outputs);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto out = on_cpu(output), in = on_cpu(input);
    auto work = gloo->_reduce_scatter_base(out, in, as_sum(options));
    Tensors found{out};
    divide(options, work, found);
    return with(work, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto out = on_cpu(outputs), in = on_cpu(inputs);
    auto work = gloo->reduce_scatter_tensor_coalesced(out, in, as_sum(options));
    divide(options, work, out);
    return with(work, outputs);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outputs, std::vector<int64_t>& inputs,
                        const c10d::AllToAllOptions& options) override {
    auto out = on_cpu(output), in = on_cpu(input);
    return with(gloo->alltoall_base(out, in, outputs, inputs, options), {output});
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    auto inner = on_cpu(tensors);
    return with(gloo->send(inner, target, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto inner = on_cpu(tensors);
    return with(gloo->recv(inner, source, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return gloo->barrier(c10d::BarrierOptions()); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  m.def("count", [] { return kCount; });
  m.def("current", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
  m.def("generator", [](int index) { return generator(index); });
  m.def("allocated", [](int index) { return allocated[index]; });
  m.def("peak", [](int index) { return peak[index]; });
  m.def("reset_peak", [](int index) { peak[index] = allocated[index]; });
  m.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<DeviceBackend>(std::move(gloo));
  });
}
