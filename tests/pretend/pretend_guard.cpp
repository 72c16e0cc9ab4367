// The parts of a pretend device that only C++ can give to torch: the current device, pinned
// memory, the timer of DDP, and the count of allocated bytes. Everything else is Python.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/dlpack.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

namespace {

constexpr int kMaxDevices = 16;
thread_local int current_device = 0;
int device_count = 1;
DeviceType device_type = DeviceType::CUDA;
// The number of its type in DLPack.
int dlpack_type = kDLCUDA;

// Streams exist in Python only. Work is done when it is submitted, except for copies, which
// pretend_runtime.py delays.
struct PretendGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return device_type; }
  Device exchangeDevice(Device device) const override {
    const int before = current_device;
    current_device = device.index();
    return Device(device_type, before);
  }
  Device getDevice() const override { return Device(device_type, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
PretendGuard guard;

// Pinned memory is ordinary memory whose addresses are remembered.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;

void free_pinned(void* block) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.erase(static_cast<const char*>(block));
  }
  std::free(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = bytes ? bytes : 64;
    void* block = nullptr;
    if (posix_memalign(&block, 64, size) != 0) {
      throw std::bad_alloc();
    }
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const char*>(block)] = size;
    return {block, block, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const char* position = static_cast<const char*>(address);
  auto next = pinned_blocks.upper_bound(position);
  if (next == pinned_blocks.begin()) {
    return false;
  }
  const auto block = std::prev(next);
  return position < block->first + block->second;
}

// The memory of a device: each tensor that enters it is counted until torch deletes its capsule.
struct Block {
  void (*deleter)(DLManagedTensor*);
  int device;
  size_t bytes;
  bool is_resident;
};
std::mutex memory_mutex;
std::map<DLManagedTensor*, Block> blocks;
size_t allocated[kMaxDevices], peak[kMaxDevices], limit[kMaxDevices];

void add(int device, size_t bytes) {
  allocated[device] += bytes;
  peak[device] = std::max(peak[device], allocated[device]);
}

void delete_block(DLManagedTensor* tensor) {
  void (*deleter)(DLManagedTensor*) = nullptr;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    const auto entry = blocks.find(tensor);
    deleter = entry->second.deleter;
    if (entry->second.is_resident) {
      allocated[entry->second.device] -= entry->second.bytes;
    }
    blocks.erase(entry);
  }
  deleter(tensor);
}

// Return the device that owns the memory at an address, which torch asks for an XPU.
Device device_of(const void* data) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (const auto& [tensor, block] : blocks) {
    if (tensor->dl_tensor.data == data) {
      return Device(device_type, block.device);
    }
  }
  return Device(device_type, 0);
}

}  // namespace

extern "C" {

// Register devices of a type such as "xpu".
void pretend_install(int count, const char* type, int type_in_dlpack) {
  device_count = count;
  device_type = Device(type).type();
  dlpack_type = type_in_dlpack;
  c10::impl::device_guard_impl_registry[static_cast<int>(device_type)].store(&guard);
}
int pretend_get_device() { return current_device; }
int pretend_set_device(int index) {
  const int before = current_device;
  if (index >= 0) {
    current_device = index;
  }
  return before;
}

// Return whether a device has room for further bytes; a limit of 0 means none.
int pretend_has_room(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return limit[device] == 0 || allocated[device] + bytes <= limit[device];
}
// Move a tensor that torch has just exported from the host to a device.
void pretend_move(DLManagedTensor* tensor, int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  tensor->dl_tensor.device = {static_cast<DLDeviceType>(dlpack_type), device};
  blocks[tensor] = {tensor->deleter, device, bytes, true};
  tensor->deleter = &delete_block;
  add(device, bytes);
}
// Count the memory at an address or not, as if its storage had been allocated again or freed.
void pretend_set_resident(const void* data, int is_resident) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (auto& [tensor, block] : blocks) {
    if (tensor->dl_tensor.data == data && block.is_resident != static_cast<bool>(is_resident)) {
      block.is_resident = is_resident;
      if (is_resident) {
        add(block.device, block.bytes);
      } else {
        allocated[block.device] -= block.bytes;
      }
    }
  }
}
// Return whether the memory at an address belongs to a device.
int pretend_owns(const void* data) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return std::any_of(blocks.begin(), blocks.end(), [data](const auto& entry) {
    return entry.first->dl_tensor.data == data;
  });
}
size_t pretend_allocated(int device) { return allocated[device]; }
size_t pretend_peak(int device) { return peak[device]; }
void pretend_reset_peak(int device) { peak[device] = allocated[device]; }
void pretend_set_limit(int device, size_t bytes) { limit[device] = bytes; }

}  // extern "C"

namespace c10d {
struct PretendTimer final : Timer {
  explicit PretendTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendTimer);
}  // namespace c10d

namespace at {
// What the hooks of all types have in common.
template <class Interface, DeviceType type>
struct PretendHooks : Interface {
  bool isBuilt() const override { return device_type == type; }
  bool isAvailable() const override { return isBuilt() && device_count > 0; }
  void init() const override {}
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return isBuilt() ? device_count : 0; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = ::current_device;
    ::current_device = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  Device getDeviceFromPtr(void* data) const override { return device_of(data); }
};

struct CUDAHooks : PretendHooks<CUDAHooksInterface, DeviceType::CUDA> {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return isAvailable(); }
  DeviceIndex current_device() const override { return ::current_device; }
  int getNumGPUs() const override { return deviceCount(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

struct XPUHooks : PretendHooks<XPUHooksInterface, DeviceType::XPU> {
  bool hasXPU() const override { return isAvailable(); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getNumGPUs() const override { return deviceCount(); }
};
REGISTER_XPU_HOOKS(XPUHooks)

struct MPSHooks : PretendHooks<MPSHooksInterface, DeviceType::MPS> {
  bool hasMPS() const override { return isAvailable(); }
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(false, "torch pins no memory for MPS devices (pytorch issue 86060)");
  }
};
REGISTER_MPS_HOOKS(MPSHooks)
}  // namespace at
